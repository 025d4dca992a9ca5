import torch

from khtst_compile.zoo.streams import stream


def draw(seed: int, name: str) -> torch.Tensor:
    return torch.rand(8, generator=stream(seed, name))


def test_a_stream_is_its_seed_and_its_name() -> None:
    assert torch.equal(draw(3, "masks"), draw(3, "masks"))
    assert not torch.equal(draw(3, "masks"), draw(3, "batches"))
    assert not torch.equal(draw(3, "masks"), draw(4, "masks"))


def test_drawing_from_one_leaves_the_other_and_torch_itself() -> None:
    before = torch.get_rng_state()
    masks, batches = stream(0, "masks"), stream(0, "batches")
    torch.rand(100, generator=masks)
    assert torch.equal(torch.rand(8, generator=batches), draw(0, "batches"))
    assert torch.equal(torch.get_rng_state(), before)
