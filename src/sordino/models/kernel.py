def clipped_sum(*a, **k):
    return None
