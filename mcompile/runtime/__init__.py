"""The runtime: loads artifacts and runs them. Imports nothing of the compiler; needs numpy and llvmlite only."""

from mcompile.runtime.artifact import Artifact, Manifest, load, save, to_bytes
from mcompile.runtime.binding import IOBinding, OrtValue
from mcompile.runtime.cache import ArtifactCache, open_cache
from mcompile.runtime.options import (
    ExecutionMode,
    GraphOptimizationLevel,
    ModelMetadata,
    RunOptions,
    SessionOptions,
    get_available_providers,
    get_device,
)
from mcompile.runtime.profile import CallTiming, Profile
from mcompile.runtime.session import InferenceSession

__all__ = [
    "Artifact",
    "ArtifactCache",
    "CallTiming",
    "ExecutionMode",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "Manifest",
    "ModelMetadata",
    "OrtValue",
    "Profile",
    "RunOptions",
    "SessionOptions",
    "get_available_providers",
    "get_device",
    "load",
    "open_cache",
    "save",
    "to_bytes",
]
