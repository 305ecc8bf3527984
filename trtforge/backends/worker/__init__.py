"""The child side of a build: a fresh interpreter that loads one TensorRT module and builds one engine.

Nothing here imports more of trtforge than this package, so that a folder with it reproduces a build in any Python that
has the library; only TensorRT's own calibrator, which has to be fed, loads `trtforge.backends.feeding`.

Standard input is the request, one JSON object; the file descriptor in the first argument takes the answer, in JSON
lines. What the native libraries print themselves goes elsewhere and cannot mix with them. Lines: `message` (severity,
text), `phase` and `step` (text, fraction), and as the last one `built`, `no_engine` (the builder refused; its reasons are
in `lines`) or `problems` (something asked for cannot be done).
"""
