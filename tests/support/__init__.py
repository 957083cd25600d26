"""What the starters of jobs in these folders share; see README.md."""
