"""How a model that sees reads a batch: the tower makes features of the images, they take the places of the image tokens, the language model goes on.

Done here, not by the models' own forward, which looks for image tokens on the device and waits for it.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.utils import ModelOutput

from finefit.objective.batch import Extra
from finefit.spec.models import Tower


class Sight(Protocol):
    @property
    def towers(self) -> Mapping[Tower, tuple[str, ...]]:
        """Dotted names of modules below the whole model; the longest that a module's name begins with says which tower it belongs to."""
        ...

    def read(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        """With `last_hidden_state`. `extra` is what the lens of the family made; None: text alone. `settings` are for the language model: a cache...
        Nothing is read on the host, so a rehearsal runs the same."""
        ...
