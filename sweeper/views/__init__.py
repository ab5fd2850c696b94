"""What one command shows of a study. Nothing here changes anything."""
