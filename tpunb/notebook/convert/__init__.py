"""From a notebook to the Python script that runs it: `Script`."""
