"""Patches neither overlap nor leave gaps, so the convolution that embeds them is a product. As one it has no workspace that cuDNN chooses when it
runs, and what it gives lies patch by patch: a norm would copy channels that lie apart, in every layer of the tower.

N tiles, C channels, S pixels of a side, R patches of a side, P of a tile, H hidden.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear


def take_product(proj: nn.Module) -> None:
    """From now on. Again and again is the same as once."""
    product = _PRODUCTS.get(type(proj))
    if product is not None and "forward" not in vars(proj):
        proj.forward = partial(product, proj)


def _of_patches(proj: nn.Conv3d, patches: Tensor) -> Tensor:
    """They come cut out, one behind the other."""
    return linear(patches.flatten(1), proj.weight.flatten(1), proj.bias)


def _of_tiles(proj: nn.Conv2d, tiles_NCSS: Tensor) -> Tensor:
    """N x H x R x R as of a convolution, a view of N x P x H. Pixels beyond the last whole patch are not seen."""
    down, across = proj.kernel_size
    tiles, channels, height, width = tiles_NCSS.shape
    rows, columns = height // down, width // across
    seen = tiles_NCSS[:, :, : rows * down, : columns * across].view(tiles, channels, rows, down, columns, across)
    patches = seen.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return linear(patches, proj.weight.flatten(1), proj.bias).transpose(1, 2).view(tiles, -1, rows, columns)


_PRODUCTS: Mapping[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {nn.Conv2d: _of_tiles, nn.Conv3d: _of_patches}
