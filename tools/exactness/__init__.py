"""Random sessions of a model in which every log-probability is compared, bit by bit, with that of
the request alone; and where in the model the first difference arises.

texts        what is asked, and its bits alone and without a cache
ways         engines on the same weights that compute it in other ways
sessions     who comes when, asks for what, and is aborted
comparison   what was compared and what differs
watching     digests of what each operation gives for each token
locating     the first one that is not the same
"""
