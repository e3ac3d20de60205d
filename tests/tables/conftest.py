from tests.fake_driver import driver  # noqa: F401
