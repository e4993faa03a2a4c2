"""A backend that needs what nobody has."""

import a_framework_that_nobody_has  # noqa: F401
