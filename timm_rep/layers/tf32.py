"""Where torch may round float32 to TF32 on a GPU."""
import torch


def matmul_uses_tf32() -> bool:
    """Whether matrix products of float32 on a GPU may be rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    # where fp32_precision was set, torch refuses to read allow_tf32
    return matmul.fp32_precision == 'tf32' if hasattr(matmul, 'fp32_precision') else matmul.allow_tf32


def convolution_uses_tf32() -> bool:
    """Whether convolutions of float32 on a GPU may be rounded to TF32."""
    cudnn = torch.backends.cudnn
    return cudnn.conv.fp32_precision == 'tf32' if hasattr(cudnn, 'conv') else cudnn.allow_tf32
