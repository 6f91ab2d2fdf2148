"""The sub-commands of `rankscope`, one typer function a file, each imported only when called."""
