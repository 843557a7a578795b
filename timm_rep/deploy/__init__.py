from ._export import VERIFICATION_NAME, Exported, check_target, export
from .formats import BACKENDS, FORMATS, Backend, Format, check_format, onnx_runner, write_onnx
from .quantize import Quantized, check_quantization, load_quantized, quantize_ptq, quantize_qat
from .report import CALIBRATORS, REPORT_NAME, Accuracy, QuantizationReport, quantized_files, read_report

__all__ = [
    'BACKENDS',
    'CALIBRATORS',
    'FORMATS',
    'REPORT_NAME',
    'VERIFICATION_NAME',
    'Accuracy',
    'Backend',
    'Exported',
    'Format',
    'QuantizationReport',
    'Quantized',
    'check_format',
    'check_quantization',
    'check_target',
    'export',
    'load_quantized',
    'onnx_runner',
    'quantize_ptq',
    'quantize_qat',
    'quantized_files',
    'read_report',
    'write_onnx',
]
