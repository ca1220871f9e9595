package weights

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// errHidden is returned if the kernel does not tell what is in the page cache. Since Linux 5.2, the kernel reports
// every page of a file as cached to a caller who neither owns the file nor may write it (mm/mincore.c, can_do_mincore).
// gVisor reports every file as fully cached.
var errHidden = errors.New("the kernel tells only owners and writers of a file whether it is in the page cache")

// windowSize is how many bytes of a file are mapped at once. The kernel's answer for so many bytes takes 256 KiB.
const windowSize = 1 << 30

// resident returns how many bytes of the files are in the page cache. It does not read the files. The error wraps
// errHidden if the kernel does not tell.
func resident(files []File) (int64, error) {
	var n int64
	for _, file := range files {
		m, err := residentIn(file.Path, 0, file.Size)
		if err != nil {
			return 0, err
		}
		n += m
	}
	return n, nil
}

// residentIn returns how many bytes of one part of a file are in the page cache. The offset of the part must be a
// multiple of the page size.
func residentIn(path string, offset, length int64) (n int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := checkHonest(f); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	page := int64(os.Getpagesize())
	for end := offset + length; offset < end; offset += windowSize {
		window := min(windowSize, end-offset)
		pages, err := incore(f, offset, window)
		if err != nil {
			return 0, fmt.Errorf("find out which part of %s is in the page cache: %w", path, err)
		}
		for i, state := range pages {
			if state&1 != 0 { // the other bits are reserved
				n += min(page, window-int64(i)*page)
			}
		}
	}
	return n, nil
}

// checkHonest returns errHidden if the kernel says that a page far beyond the end of the file is in the page cache.
// That is impossible, so this kernel would say the same of every page.
func checkHonest(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	const far = 1 << 30 // no page is large enough to reach this far beyond the end
	pages, err := incore(f, (info.Size()/far+2)*far, 1)
	if err != nil {
		return fmt.Errorf("find out what is in the page cache: %w", err)
	}
	if pages[0]&1 != 0 {
		return errHidden
	}
	return nil
}

// incore asks the kernel for one byte per page of a part of the file. The lowest bit of each byte says whether the page
// is in the page cache.
func incore(f *os.File, offset, length int64) ([]byte, error) {
	// PROT_NONE makes sure that no page is read by mistake.
	mapped, err := unix.Mmap(int(f.Fd()), offset, int(length), unix.PROT_NONE, unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	page := int64(os.Getpagesize())
	pages := make([]byte, (length+page-1)/page)
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(mapped))), uintptr(length),
		uintptr(unsafe.Pointer(unsafe.SliceData(pages))))
	if err := unix.Munmap(mapped); err != nil {
		return nil, fmt.Errorf("munmap: %w", err)
	}
	if errno != 0 {
		return nil, fmt.Errorf("mincore: %w", errno)
	}
	return pages, nil
}
