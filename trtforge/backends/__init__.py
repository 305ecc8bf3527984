"""What TensorRT versions can do, and the builders that use them.

`capabilities` is a table, one row a version; `refusals` compares a spec and a model with a row before anything is
built; `compatibility` compares the machine with what a version needs. None of the three imports TensorRT.
"""
