"""The cases are modules of their own: show what is compared in their asserts too."""

import pytest

pytest.register_assert_rewrite(
    "manager_machine",
    "manager_scenario",
    "manager_support",
    "cases",
    "cases_books",
    "cases_gradients",
    "cases_homes",
    "cases_life",
    "cases_lookups",
    "cases_memory",
    "cases_norms",
    "cases_optimizer",
    "cases_prediction",
    "cases_unused",
    "cases_values",
)
