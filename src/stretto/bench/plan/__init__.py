"""`stretto bench plan` and `published`: the planner's predictions beside measured and published step times."""
