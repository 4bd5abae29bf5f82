"""Read WAV files, bring waveforms to one length, and compute the log-mel spectrograms that an encoder sees.

A WAV file gives its points as they were recorded, int16. A batch of waveforms is cropped or padded to one length, and
its spectrogram is computed on the device of the waveforms.

Guarantees: reading a sound never resamples it, mixes it down to mono or rescales it. A file that is cut off is refused.
"""

__all__: list[str] = []
