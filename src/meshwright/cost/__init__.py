"""Cost model: devices, links and clusters, and the seconds of operators and of resharding steps."""

from ._cluster import Cluster, cluster_of
from ._describe import cluster
from ._device import DATA_SHEET, DEVICES, NARROWEST, Device, device_of, name_of_device
from ._errors import CostError
from ._kernels import Flags, Habits, KernelTimes, Numbers
from ._link import LINKS, Link, link_of

__all__ = [
    "DATA_SHEET",
    "DEVICES",
    "LINKS",
    "NARROWEST",
    "Cluster",
    "CostError",
    "Device",
    "Flags",
    "Habits",
    "KernelTimes",
    "Link",
    "Numbers",
    "cluster",
    "cluster_of",
    "device_of",
    "link_of",
    "name_of_device",
]
