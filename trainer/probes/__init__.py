"""Reading out: how well can a label be told from what a frozen encoder computes?

Comes in: a trained encoder, its view policy, and every sample of the train and test shards once; or, while the encoder
is trained, some of them. Goes out: for each label the accuracy of a linear probe and of a kNN vote, the trained heads,
and curves over checkpoints. What may never happen: a probe that changes the encoder, that scores a test sample twice or
not at all, that depends on the number of ranks, or that lets the two label spaces mix.
"""
