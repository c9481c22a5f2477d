"""The table [adapter]: train small matrices beside a frozen model instead of all its weights. No torch."""

import re
from typing import Annotated, Final

from pydantic import Field, field_validator

from offbeat.config.sections import FROM_TOML, Section

ALL_LINEAR: Final = "all-linear"
LINEAR_LAYERS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block in models of the Llama family. The output head is not one of them."""
FULL_RATE: Final = 5e-6
"""A learning rate up to this one looks like a rate for training all weights."""
ALPHA: Final = 32.0


class AdapterConfig(Section):
    """[adapter]: a low-rank adapter (LoRA): two small matrices beside each linear layer. Only they are trained."""

    rank: Annotated[int, Field(ge=0)] = 0
    """The inner size of the two matrices; 0 trains all weights. Reinforcement learning needs little: 8 is a good start,
    and ranks from 1 to 32 are reported to learn like full training. Raise it if the run learns more slowly than
    without an adapter."""
    alpha: Annotated[float, Field(gt=0)] = ALPHA
    """The product of the matrices is multiplied by alpha / rank. Leave it and tune the learning rate: with this factor
    the best rate hardly depends on the rank."""
    targets: str | Annotated[tuple[str, ...], FROM_TOML] = ALL_LINEAR
    """The layers that get matrices: `all-linear` is every linear layer but the output head, or a list of names such as
    `["q_proj", "v_proj"]`. Fewer layers save little memory and learn less."""

    @field_validator("targets")
    @classmethod
    def _names(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        names = (targets,) if isinstance(targets, str) else targets
        if targets == ALL_LINEAR:
            return targets
        if odd := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_]+", name)]:
            raise ValueError(
                f"holds {odd[0]!r}, which is not the name of a layer; patterns and paths are not supported, because "
                'engines read them differently: write names such as ["q_proj", "v_proj"], or "all-linear"'
            )
        if isinstance(targets, str):
            raise ValueError(f'is one name; write a list, ["{targets}"], or "all-linear"')
        if not targets or len(set(targets)) < len(targets):
            raise ValueError('is empty or names a layer twice; write names such as ["q_proj", "v_proj"]')
        return targets

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers."""
        return LINEAR_LAYERS if isinstance(self.targets, str) else self.targets

    def problems(self) -> list[str]:
        """Return the settings that have no effect without a rank."""
        if self.rank:
            return []
        found = [f"adapter.alpha = {self.alpha:g}"] if self.alpha != ALPHA else []
        found += [f"adapter.targets = {list(self.targets)}"] if not isinstance(self.targets, str) else []
        return [f"{one} has no effect without adapter.rank; set adapter.rank = 8, or remove it" for one in found]
