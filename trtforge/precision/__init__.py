"""FP16 and BF16 compiled into the graph: what is lowered and why, an emulation of it on the CPU, and an audit."""
