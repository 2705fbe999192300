"""Search for plans and pipeline schedules, and prediction of the time and memory that a plan takes.

plan_data           plans and accounts as data, numbers with units, and a progress bar
scheduling          search for the best pipeline schedule, with a proven lower bound
transformer_plans   predict and choose plans for a transformer that is described by its sizes
sharding            exact search for the sharding of each operator of a captured model
stages              divide a captured chain of layers into pipeline stages
module_plans        search, write and read plans for a captured module: mesh, layouts, pipeline
_errors             the error of the search, and a check of sizes
"""

from ._errors import SearchError
from .module_plans.mesh_plan import REPLICAS, STAGES, MeshPlan
from .module_plans.mesh_plan_parser import parse_mesh_plan
from .module_plans.mesh_search import plan_mesh
from .module_plans.pipeline_plan import Pipelining
from .module_plans.program_account import program_account
from .plan_data.account import Account, Curve, Laid, Rival, Sent
from .plan_data.plan import Plan, parse_plan, plan_of, quoted
from .plan_data.progress_bar import OnStep, shown
from .plan_data.units import count, seconds, share, size
from .scheduling.bounds import lower_bound
from .scheduling.find_schedule import Found, find_placement, find_schedule
from .scheduling.hints import hints
from .scheduling.problem import Objective, Problem
from .sharding.accumulation_check import Evenly, evenly, rows_of
from .sharding.conversion_prices import Prices
from .sharding.forms import Form
from .sharding.memory_saving import Saving
from .sharding.sharding_search import Cuts, Meeting, cut, every_cut
from .transformer_plans.choose import Choice, Priced, choose
from .transformer_plans.config import transformer_of
from .transformer_plans.degrees import Degrees, Plans, columns
from .transformer_plans.peak_memory import Held, hold
from .transformer_plans.plan_account import account, differences
from .transformer_plans.predict import Prediction, predict, share_of_peak, work
from .transformer_plans.simulated_step import simulated
from .transformer_plans.sizes import Experts, Latent, Transformer, Window
from .transformer_plans.software import (
    DEEPSPEED,
    DEEPSPEED_ZERO,
    EAGER,
    FSDP,
    MEGATRON,
    MEGATRON_2021,
    OURS,
    PAGEABLE,
    Software,
)

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
