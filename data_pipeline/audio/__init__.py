"""Read WAV files, make waveforms of one length, and compute the log-mel spectrograms that an encoder sees.

A WAV file gives its points as they were recorded, int16. A batch of them is cropped or padded to one length, and its
spectrogram is computed on the device of the waveforms.

Guarantees: no sound is silently resampled, mixed down to mono, rescaled, or shorter than its file says.
"""
