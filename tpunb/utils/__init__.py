"""Small helpers that every other package may use: text, files, processes, memory."""
