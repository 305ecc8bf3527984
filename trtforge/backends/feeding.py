"""Calibration batches from files into the GPU's memory, for TensorRT's own calibrator. Runs in the process that builds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BufferedReader, FileIO

from trtforge.cuda import Bytes, open_cuda
from trtforge.errors import CalibrationError


class Feed:
    """Hands over one batch after the other. Holds one in host and one in device memory, however many there are.

    What it holds is given back when the process ends.
    """

    def __init__(self, files: Mapping[str, tuple[str, int]]) -> None:
        """Opens files and takes memory.

        Args:
            files: input -> file with its values, batch after batch, and bytes of a batch.

        Raises:
            CapabilityError: there is no CUDA, or not memory enough.
            OSError: a file cannot be opened.
        """
        self._cuda = open_cuda()
        self._stream = self._cuda.stream()
        self._files: dict[str, BufferedReader] = {}
        self._host: dict[str, Bytes] = {}
        self._device: dict[str, int] = {}
        for name, (path, num_bytes) in files.items():
            self._files[name] = BufferedReader(FileIO(path))
            self._host[name] = self._cuda.allocate_host(num_bytes)
            self._device[name] = self._cuda.allocate(num_bytes)

    def next_batch(self, names: Sequence[str]) -> list[int]:
        """Device pointers of the next batch's inputs, in the order of `names`. They stay the same in every call.

        Raises:
            CalibrationError: there are no values for an input, or fewer than a batch.
            CapabilityError: CUDA stopped.
        """
        for name in names:
            if name not in self._files:
                raise CalibrationError(
                    f"TensorRT asks for values of '{name}', and the batches have {', '.join(self._files)}",
                    next_step="export the model again, so that its inputs have the names that the data have",
                )
            host = self._host[name]
            found = self._files[name].readinto(host.data)
            if found != host.nbytes:
                raise CalibrationError(
                    f"the file of batches of '{name}' ended after {found} of {host.nbytes} bytes",
                    next_step="run the build again",
                )
            self._cuda.to_device(self._device[name], host, self._stream)
        self._cuda.synchronize(self._stream)
        return [self._device[name] for name in names]
