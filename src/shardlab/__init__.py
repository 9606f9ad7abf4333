"""shardlab: cut a model over ranks, count every byte that moves, and get the single process's answer back."""
