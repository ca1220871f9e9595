package weights

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"vllmtuner/render"
)

// maxPercent is the percentage of the memory that the weights may take. The server that loads them needs memory too. A
// page cache that cannot hold all of the weights is of little use, because each load reads the weights in the same
// order, and the kernel drops the oldest pages first.
const maxPercent = 70

// Warm reads those parts of the files into the page cache that are not there yet. The caller says how many bytes of
// memory are available: they are free or can be reclaimed, both in the machine and under the limit of the cgroup. The
// page cache counts against that limit. If the files would take more than 70 % of the available bytes, Warm reads
// nothing. This is no error, and Report.Skipped says why.
//
// vLLM maps the files and reads them in order, in one process. Often the kernel reads ahead by only 128 KiB: this is
// the default of most file systems, and of NFS since Linux 5.4. Then each 128 KiB needs a call to the file server, with
// its latency. Warm hides the latency by parallel reads. Examples for files of 1 GiB at 500 MB/s: with 0.2 ms per call,
// they load in 2.4 s instead of 5.4 s. With 1 ms per call, they load in 3.0 s instead of 10.1 s. With 4 ms, they load
// in 6.3 s instead of 22.9 s. With a readahead of 4 MiB Warm gains nothing, and costs 0.2 s.
//
// If progress is not nil, Warm calls it from one goroutine at a time, with the number of bytes that are done. When ctx
// ends, Warm first completes the reads in progress, at most four of 8 MiB, and then returns the cause of ctx. A file
// server that hangs delays this.
func Warm(ctx context.Context, files []File, available int64, progress func(done, total int64)) (report Report, err error) {
	began := time.Now()
	defer func() { report.Took = time.Since(began) }()
	report = Report{Bytes: sum(files), WasResident: -1, NowResident: -1}
	if report.Bytes > available/100*maxPercent {
		report.Skipped = fmt.Sprintf("the weights take %s, more than %d %% of the %s of memory that may be used",
			render.Bytes(report.Bytes), maxPercent, render.Bytes(available))
		return report, nil
	}
	if report.WasResident, err = residentIfKnown(files); err != nil {
		return report, fmt.Errorf("warm the page cache: %w", err)
	}
	if report.WasResident == report.Bytes {
		report.NowResident, report.Skipped = report.Bytes, "all of the weights were in the page cache"
		return report, nil
	}
	if report.Read, err = readMissing(ctx, files, report.WasResident >= 0, &tally{total: report.Bytes, tell: progress}); err != nil {
		return report, fmt.Errorf("warm the page cache: %w", err)
	}
	if report.NowResident, err = residentIfKnown(files); err != nil {
		return report, fmt.Errorf("warm the page cache: %w", err)
	}
	return report, nil
}

// residentIfKnown is like resident, but returns -1 if the kernel does not tell.
func residentIfKnown(files []File) (int64, error) {
	n, err := resident(files)
	if errors.Is(err, errHidden) {
		return -1, nil
	}
	return n, err
}

// readMissing reads the files and returns how many bytes it read. If the kernel tells what is in the page cache,
// readMissing skips the segments that are there.
func readMissing(ctx context.Context, files []File, kernelTells bool, done *tally) (int64, error) {
	var n atomic.Int64
	err := inParallel(ctx, segments(files), func(ctx context.Context, s segment, buffer []byte) error {
		path := files[s.file].Path
		if kernelTells {
			resident, err := residentIn(path, s.offset, s.length)
			if err != nil {
				return err
			}
			if resident == s.length {
				done.add(s.length)
				return nil
			}
		}
		return read(ctx, path, s, buffer, func(block []byte, _ int64) error {
			n.Add(int64(len(block)))
			done.add(int64(len(block)))
			return nil
		})
	})
	return n.Load(), err
}
