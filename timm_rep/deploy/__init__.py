from .export import Exported, check_target, export
from .formats import FORMATS, check_format, onnx_runner, write_onnx
from .verification import VERIFICATION, read_verifications, write_verification

__all__ = [
    'FORMATS',
    'VERIFICATION',
    'Exported',
    'check_format',
    'check_target',
    'export',
    'onnx_runner',
    'read_verifications',
    'write_onnx',
    'write_verification',
]
