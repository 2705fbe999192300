"""Search for plans and pipeline schedules, and prediction of the time and memory that a plan takes.

plan_data             plans and accounts as data, numbers with units, and a progress bar
scheduling            search for the best pipeline schedule, with a proven lower bound
transformer_plans     predict and choose plans for a transformer that is described by its sizes
transformer_accounts  explain plans for such a transformer: costs, reasons, assumptions, changes, recipes
phase_plans           plans for steps with two phases, training and generation
sharding              exact search for the sharding of each operator of a captured model
stages                divide a captured chain of layers into pipeline stages
module_plans          search, write and read plans for a captured module: mesh, layouts, pipeline
_errors               the error of the search, and a check of sizes
"""

from typing import TYPE_CHECKING

from meshwright.layout import lazy_names

if TYPE_CHECKING:
    from ._errors import SearchError
    from .module_plans.mesh_plan import REPLICAS, STAGES, MeshPlan
    from .module_plans.mesh_plan_parser import parse_mesh_plan
    from .module_plans.mesh_search import plan_mesh
    from .module_plans.pipeline_plan import Pipelining
    from .module_plans.program_account import program_account
    from .phase_plans.generation import GenerationSizes, SamplerLayout
    from .phase_plans.generation_memory import generation_bytes
    from .phase_plans.generation_time import GenerationSeconds, generation_seconds
    from .phase_plans.phase_plan import PhasePlan
    from .phase_plans.phase_search import plan_phases
    from .phase_plans.weight_moves import WeightMove, received_bytes, weight_move
    from .plan_data.account import Account, Change, Communication, MemoryCurve, OtherPlan, TensorLayout, Throughput
    from .plan_data.account_text import account_text, beside
    from .plan_data.plan import Plan, differences, parse_plan, plan_of
    from .plan_data.progress_bar import OnProgress, progress_bar
    from .plan_data.text_table import text_table
    from .plan_data.units import count, seconds, share, size
    from .scheduling.bounds import lower_bound
    from .scheduling.find_schedule import CertifiedSchedule, find_placement, find_schedule
    from .scheduling.hints import hints
    from .scheduling.problem import Objective, Problem
    from .sharding.accumulation_check import AccumulationCheck, check_accumulation, first_tensor_rows
    from .sharding.conversion_prices import Prices
    from .sharding.forms import AxisForm
    from .sharding.memory_saving import MemorySaving
    from .sharding.sharding_search import PricedConversion, Shardings, best_shardings, least_by_enumeration
    from .transformer_accounts.assumptions import assumptions
    from .transformer_accounts.changes import changes
    from .transformer_accounts.known_recipes import nearest_recipes
    from .transformer_accounts.plan_account import account, throughput
    from .transformer_plans.choose import PlanChoice, PricedPlan, choose, usable_memory
    from .transformer_plans.config import transformer_of
    from .transformer_plans.degrees import Degrees, Plans, columns
    from .transformer_plans.peak_memory import Held, hold
    from .transformer_plans.predict import Prediction, flops_utilisation, model_flops, predict
    from .transformer_plans.simulated_step import simulate_step
    from .transformer_plans.sizes import Experts, Latent, Transformer, Window
    from .transformer_plans.software import MESHWRIGHT, Software

__all__ = [
    "MESHWRIGHT",
    "REPLICAS",
    "STAGES",
    "Account",
    "AccumulationCheck",
    "AxisForm",
    "CertifiedSchedule",
    "Change",
    "Communication",
    "Degrees",
    "Experts",
    "GenerationSeconds",
    "GenerationSizes",
    "Held",
    "Latent",
    "MemoryCurve",
    "MemorySaving",
    "MeshPlan",
    "Objective",
    "OnProgress",
    "OtherPlan",
    "PhasePlan",
    "Pipelining",
    "Plan",
    "PlanChoice",
    "Plans",
    "Prediction",
    "PricedConversion",
    "PricedPlan",
    "Prices",
    "Problem",
    "SamplerLayout",
    "SearchError",
    "Shardings",
    "Software",
    "TensorLayout",
    "Throughput",
    "Transformer",
    "WeightMove",
    "Window",
    "account",
    "account_text",
    "assumptions",
    "beside",
    "best_shardings",
    "changes",
    "check_accumulation",
    "choose",
    "columns",
    "count",
    "differences",
    "find_placement",
    "find_schedule",
    "first_tensor_rows",
    "flops_utilisation",
    "generation_bytes",
    "generation_seconds",
    "hints",
    "hold",
    "least_by_enumeration",
    "lower_bound",
    "model_flops",
    "nearest_recipes",
    "parse_mesh_plan",
    "parse_plan",
    "plan_mesh",
    "plan_of",
    "plan_phases",
    "predict",
    "program_account",
    "progress_bar",
    "received_bytes",
    "seconds",
    "share",
    "simulate_step",
    "size",
    "text_table",
    "throughput",
    "transformer_of",
    "usable_memory",
    "weight_move",
]

__getattr__ = lazy_names(__name__)
