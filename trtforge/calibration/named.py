"""The calibration table that a spec names, and whether it still belongs to the model."""

from __future__ import annotations

from trtforge.calibration.table import CalibrationTable, read_table, stale_reasons
from trtforge.errors import CalibrationError, shown_path
from trtforge.spec.load import SpecFile


def named_table(spec_file: SpecFile, graph_digest: str) -> CalibrationTable | None:
    """The table of `calibration: {table: ...}`, None where the spec names none. Loads neither onnx nor onnxruntime.

    Raises:
        StoreError, CalibrationError, SeveralErrors: it cannot be read, or was made for another model.
    """
    calibration = spec_file.spec.calibration
    if calibration is None or calibration.table is None:
        return None
    table = read_table(calibration.table)
    reasons = stale_reasons(table, graph_digest=graph_digest)
    if reasons:
        raise CalibrationError(
            f"{shown_path(calibration.table)} is stale: {reasons[0]}",
            where=spec_file.where("calibration", "table"),
            detail=reasons[1:],
            next_step="calibrate again: write calibration: {data: ...}, then trtforge calibrate SPEC --output "
            f"{shown_path(calibration.table)}",
        )
    return table
