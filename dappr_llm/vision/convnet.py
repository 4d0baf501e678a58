"""The small network of the MNIST tables: three convolutions and two dense layers, then the classifier."""

from __future__ import annotations

from torch import Tensor, nn


class ConvNet(nn.Module):
    """
    Three times convolution 5x5 with 64 channels, ReLU and max-pooling by 2; then two dense layers of 64 with ReLU.

    Args:
        channels (`int`, *optional*, defaults to 1):
            Channels of the image.
        image_size (`int`, *optional*, defaults to 28):
            Height and width; at least 8, since the image is halved three times.
        width (`int`, *optional*, defaults to 64):
            Channels of every convolution and width of the dense layers.
    """

    def __init__(self, channels: int = 1, image_size: int = 28, width: int = 64):
        super().__init__()
        sizes = (channels, width, width, width)
        blocks = [
            # The larger of two ReLUs is the ReLU of the larger: pooled first, there is a quarter of them to do.
            nn.Sequential(nn.Conv2d(before, after, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
            for before, after in zip(sizes, sizes[1:], strict=False)
        ]
        self.convolutions = nn.Sequential(*blocks)
        flat = width * (image_size // 8) ** 2
        self.dense = nn.Sequential(nn.Linear(flat, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        return self.dense(self.convolutions(images).flatten(1))  # [B, width]
