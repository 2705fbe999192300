"""Options of a step that save memory: ZeRO, recomputed activations, and a batch in pieces."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from meshwright.graph import Program

LEAST = 1024
"""Elements of the smallest parameter that ZeRO shards: the default of `Sharding`."""


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """Memory-saving options: the stage of `zero` over replicas, the recomputed layers, and the pieces of a batch.

    >>> str(MemorySaving(2, ("blocks.*",), 4))
    'ZeRO-2, recompute blocks.*, 4 pieces'
    >>> str(MemorySaving())
    ''
    """

    zero: int = 0
    recompute: tuple[str, ...] = ()
    accumulate: int = 1

    def __str__(self) -> str:
        few = [*self.recompute[:2], *([f"... {self.recompute[-1]}"] if len(self.recompute) > 2 else [])]
        said = [
            f"ZeRO-{self.zero}" if self.zero else "",
            f"recompute {', '.join(few)}" if few else "",
            f"{self.accumulate} pieces" if self.accumulate > 1 else "",
        ]
        return ", ".join(filter(None, said))

    def settings(self) -> dict[str, object]:
        """Return the options that are on, as the text of a plan has them.

        >>> MemorySaving(1, accumulate=4).settings()
        {'zero': 1, 'accumulate': 4}
        """
        return {name: value for name, value in asdict(self).items() if value != getattr(MemorySaving(), name)}

    def parameter(self, replicas: int) -> tuple[float, float, float]:
        """Return the fractions of a parameter, its gradient and its state that a replica holds.

        With pieces, whole gradients are accumulated and reduced once.
        """
        part = 1 / replicas
        is_reduced = self.zero >= 2 and self.accumulate == 1
        return part if self.zero == 3 else 1.0, part if is_reduced else 1.0, part if self.zero else 1.0


NOTHING = MemorySaving()


def blocks_of(program: Program) -> tuple[str, ...]:
    """Return the repeated layers in order: the outermost ones that have a number in a list of modules."""
    found = (block_of(node.origin.layer) for node in program.nodes)
    return tuple(dict.fromkeys(filter(None, found)))


def block_of(layer: str) -> str:
    """Return the outermost numbered layer that holds `layer`, or an empty text if there is none.

    >>> block_of("decoder.layers.3.mlp.0"), block_of("head")
    ('decoder.layers.3', '')
    """
    parts = layer.split(".")
    at = next((n for n, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def patterns_of(blocks: Collection[str]) -> tuple[str, ...]:
    """Return patterns that match all of these blocks and nothing without a number.

    >>> patterns_of(["blocks.0", "blocks.1"]), patterns_of(["0", "1"])
    (('blocks.*',), ('[0-9]*',))
    """
    lists = dict.fromkeys(block.rpartition(".")[0] for block in blocks)
    return tuple(f"{path}.*" if path else "[0-9]*" for path in lists)
