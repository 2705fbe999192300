"""Registration of the test devices and their backend for processes, by the import of this module.

`meshwright conformance --device mesh --import tests.device.registered` checks the test device.
"""

from __future__ import annotations

from .backend import register
from .process_backend import register_backend

register()
register_backend()
