"""The build spec: YAML in, a frozen `BuildSpec` out, with the place in the file for every problem."""
