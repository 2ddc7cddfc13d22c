"""Convolutions of towers, taken as products."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, conv3d

from finefit.model.sight.patches import take_product


def _tower(*, bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(3, 8, kernel_size=4, stride=4, bias=bias).double()


def _tiles(height: int = 12, width: int = 8) -> Tensor:
    return torch.randn(2, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [(12, 8), (15, 11)], ids=["whole patches", "pixels beyond them"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_convolution_and_has_its_gradients(size: tuple[int, int], bias: bool) -> None:
    proj, tiles = _tower(bias=bias), _tiles(*size).requires_grad_()
    wanted = conv2d(tiles, proj.weight, proj.bias, stride=4)
    take_product(proj)
    found = proj(tiles)
    torch.testing.assert_close(found, wanted)
    inputs = [tiles, *proj.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), inputs), torch.autograd.grad(wanted.square().sum(), inputs)
    )


def test_what_a_norm_takes_of_it_lies_patch_by_patch() -> None:
    proj = _tower()
    assert not proj(_tiles()).flatten(2).transpose(1, 2).is_contiguous()
    take_product(proj)
    assert proj(_tiles()).flatten(2).transpose(1, 2).is_contiguous()


def test_patches_that_come_cut_out_are_embedded_as_by_the_convolution() -> None:
    torch.manual_seed(0)
    proj, patches = nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4), bias=False), torch.randn(5, 3, 2, 4, 4)
    wanted = conv3d(patches, proj.weight, stride=(2, 4, 4)).flatten(1)
    take_product(proj)
    torch.testing.assert_close(proj(patches), wanted)


def test_taken_twice_is_taken_once_and_what_is_no_convolution_stays() -> None:
    proj, other = _tower(), nn.Linear(3, 3)
    take_product(proj)
    first = proj.forward
    take_product(proj)
    take_product(other)
    assert proj.forward is first
    assert "forward" not in vars(other)
