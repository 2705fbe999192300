"""Search for plans and pipeline schedules, and prediction of the time and memory that a plan takes."""

from ._account import Account, Curve, Laid, Rival, Sent
from ._bounds import lower_bound
from ._choose import Choice, Priced, choose
from ._config import transformer_of
from ._cuts import Cuts, Meeting, cut, every_cut
from ._degrees import Degrees, Plans, columns
from ._errors import SearchError
from ._even_pieces import Evenly, evenly, rows_of
from ._find import Found, find_placement, find_schedule
from ._forms import Form
from ._held import Held, hold
from ._hints import hints
from ._mesh_plan import REPLICAS, STAGES, MeshPlan
from ._mesh_plan_text import parse_mesh_plan
from ._meshes import plan_mesh
from ._pipelining import Pipelining
from ._plan import Plan, parse_plan, plan_of, quoted
from ._plan_account import account, differences
from ._predict import Prediction, predict, share_of_peak, work
from ._prices import Prices
from ._problem import Objective, Problem
from ._program_account import program_account
from ._saving import Saving
from ._shown import OnStep, shown
from ._simulated import simulated
from ._software import DEEPSPEED, DEEPSPEED_ZERO, EAGER, FSDP, MEGATRON, MEGATRON_2021, OURS, PAGEABLE, Software
from ._transformer import Experts, Latent, Transformer, Window
from ._units import count, seconds, share, size

__all__ = [
    "DEEPSPEED",
    "DEEPSPEED_ZERO",
    "EAGER",
    "FSDP",
    "MEGATRON",
    "MEGATRON_2021",
    "OURS",
    "PAGEABLE",
    "REPLICAS",
    "STAGES",
    "Account",
    "Choice",
    "Curve",
    "Cuts",
    "Degrees",
    "Evenly",
    "Experts",
    "Form",
    "Found",
    "Held",
    "Laid",
    "Latent",
    "Meeting",
    "MeshPlan",
    "Objective",
    "OnStep",
    "Pipelining",
    "Plan",
    "Plans",
    "Prediction",
    "Priced",
    "Prices",
    "Problem",
    "Rival",
    "Saving",
    "SearchError",
    "Sent",
    "Software",
    "Transformer",
    "Window",
    "account",
    "choose",
    "columns",
    "count",
    "cut",
    "differences",
    "evenly",
    "every_cut",
    "find_placement",
    "find_schedule",
    "hints",
    "hold",
    "lower_bound",
    "parse_mesh_plan",
    "parse_plan",
    "plan_mesh",
    "plan_of",
    "predict",
    "program_account",
    "quoted",
    "rows_of",
    "seconds",
    "share",
    "share_of_peak",
    "shown",
    "simulated",
    "size",
    "transformer_of",
    "work",
]
