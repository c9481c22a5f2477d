"""The scoring pool: reward functions in processes that can be killed."""
