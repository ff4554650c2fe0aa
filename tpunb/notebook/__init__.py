"""A notebook: captured from a front end, converted to a script, checked."""
