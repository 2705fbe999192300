"""The account of a compiled model: of the program that ran last, with its plan and its schedule."""

from __future__ import annotations

from meshwright.cost import Cluster
from meshwright.cost import cluster as read_cluster
from meshwright.engine import DistModel
from meshwright.search import Account, program_account


def account_of(step: DistModel, cluster: Cluster | str) -> Account:
    """Return the predicted costs of the model's program on a cluster: communication, layouts, memory, pipeline.

    `cluster` is a cluster or its text ("64xH100").

    Raises:
        StaticError: the model has not been called yet.
    """
    machines = read_cluster(cluster) if isinstance(cluster, str) else cluster
    program = step.program
    meshes = {given.spec.mesh for given in program.inputs if given.spec is not None}
    ranks = max((max(mesh.process_ids) + 1 for mesh in meshes), default=1)
    if step.pipeline is not None:
        return program_account(program, machines, ranks, step.pipeline.schedule, step.pipeline.why)
    return program_account(program, machines, ranks, how=step.plan.how if step.plan else "")
