"""Settings for the tests of the device: no search for examples in a module whose imports take seconds."""

collect_ignore = ["inductor_backend.py"]
