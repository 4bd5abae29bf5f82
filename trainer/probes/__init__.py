"""Reading out: how well can a label be told from what a frozen encoder computes?

Comes in: a trained encoder, its view policy, and every sample of the train and test shards once. Goes out: for each
label the accuracy of a linear probe and of a kNN vote. What may never happen: a probe that changes the encoder, that
scores a test sample twice or not at all, or that lets the two label spaces mix.
"""
