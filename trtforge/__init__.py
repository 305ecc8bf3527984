"""trtforge: from one YAML build spec to released TensorRT engines."""

__version__ = "0.1.0"
