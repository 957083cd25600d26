"""The job of a context: how ranks start, meet, reach each other, and end."""
