"""ONNX -> Graph: the only package that imports onnx (with the driver and the command line)."""

from mcompile.frontend.host import HostOp
from mcompile.frontend.import_model import ImportedModel, import_model

__all__ = ["HostOp", "ImportedModel", "import_model"]
