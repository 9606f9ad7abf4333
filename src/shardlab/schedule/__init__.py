"""Pipeline schedules as data: who computes what when. Standard library only."""
