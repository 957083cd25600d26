"""From a launcher's variables to a context: how ranks start, meet, reach each other, and end."""
