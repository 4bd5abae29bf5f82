"""Read sounds, bring waveforms to one length, and compute the log-mel spectrograms that an encoder sees.

A build decodes each file once, to 16 bits and one channel, at the rate of the dataset. A batch of waveforms is cropped
or padded to one length, and its spectrogram is computed on the device of the waveforms.

Guarantees: 16-bit points of one channel at the rate of the dataset are stored exactly. A WAV or FLAC that is cut off is
refused.
"""

__all__: list[str] = []
