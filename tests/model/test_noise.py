import pytest
import torch
from rushes_worker.pipeline.noise import draw_noise_

# first values of a seed's video noise and of the audio noise drawn after it, 1344x768 (FastH3 reference)
VIDEO = {
    0: [-1.1258398, -1.1523602, -0.2505786, -0.4338788],
    42: [1.9269153, 1.4872841, 0.9007172, -2.1055210],
}
AUDIO = {
    (0, 37): [0.9227838, -0.5307580, -1.3839691, -0.1559387],
    (0, 72): [-0.1466144, 1.8661436, 0.5057126, 1.0078275],
    (42, 37): [-0.6276523, -0.7058200, 0.4871793, -0.2003144],
    (42, 72): [0.6706919, -1.0361027, -0.9666964, 0.1660782],
}


@pytest.mark.parametrize(("frames", "audio_latents"), [(37, 207), (72, 405)])
@pytest.mark.parametrize("seed", [0, 42])
def test_golden_noise(seed: int, frames: int, audio_latents: int) -> None:
    video, audio = torch.empty(24, frames, 48, 84), torch.empty(2 * audio_latents, 32)
    draw_noise_(seed, video, audio)
    # the table has seven decimals
    torch.testing.assert_close(video.flatten()[:4], torch.tensor(VIDEO[seed]), atol=1e-6, rtol=0)
    torch.testing.assert_close(audio.flatten()[:4], torch.tensor(AUDIO[seed, frames]), atol=1e-6, rtol=0)


def test_seed_decides_the_noise_and_global_state_does_not() -> None:
    def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.empty(4, 2, 4, 6), torch.empty(6, 8)
        draw_noise_(seed, *noise)
        return noise

    torch.manual_seed(1)
    first = drawn(5)
    torch.manual_seed(2)
    again, other = drawn(5), drawn(6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
