"""The cases are modules of their own: show what is compared in their asserts too."""

import pytest

pytest.register_assert_rewrite(
    "manager_support",
    "cases",
    "cases_gradients",
    "cases_life",
    "cases_memory",
    "cases_norms",
    "cases_optimizer",
    "cases_prediction",
    "cases_values",
)
