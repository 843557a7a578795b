from ._export import Exported, check_target, export
from .formats import FORMATS, check_format, onnx_runner, write_onnx
from .quantize import Quantized, check_quantization, check_settings, load_quantized, quantize_ptq, quantize_qat
from .report import BACKENDS, CALIBRATORS, MODEL_FILENAMES, REPORT_NAME, Accuracy, QuantizationReport, quantized_files, read_report
from .verification import VERIFICATION, read_verifications, write_verification

__all__ = [
    'BACKENDS',
    'CALIBRATORS',
    'FORMATS',
    'MODEL_FILENAMES',
    'REPORT_NAME',
    'VERIFICATION',
    'Accuracy',
    'Exported',
    'QuantizationReport',
    'Quantized',
    'check_format',
    'check_quantization',
    'check_settings',
    'check_target',
    'export',
    'load_quantized',
    'onnx_runner',
    'quantize_ptq',
    'quantize_qat',
    'quantized_files',
    'read_report',
    'read_verifications',
    'write_onnx',
    'write_verification',
]
