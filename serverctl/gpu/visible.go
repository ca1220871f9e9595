package gpu

import (
	"slices"
	"strconv"
	"strings"
)

// Visible returns the GPUs of a reading that a program can use. Two environment variables of the program decide this.
// Visible reads them with lookupEnv, which is os.LookupEnv or a similar function for the environment of another
// program.
//
// Visible reads CUDA_VISIBLE_DEVICES as CUDA does (CUDA C++ Programming Guide, environment variables). The list holds
// indices and UUIDs, and a UUID may be shortened. The first invalid entry ends the list. If the variable is set but
// empty, no GPU is visible. Indices follow the order of nvidia-smi. CUDA has the same order if all GPUs are equal. For
// different GPUs set CUDA_DEVICE_ORDER=PCI_BUS_ID.
//
// NVIDIA_VISIBLE_DEVICES is for the container's runtime, which has already applied it: nvidia-smi lists only the GPUs
// that the runtime let in. So "all" and indices remove nothing. "void" and "" remove nothing either: they mean that the
// runtime did not use this variable. CDI sets "void" even in containers with GPUs (NVIDIA Container Toolkit since
// 1.15). Only UUIDs select GPUs here, because a DCGM exporter shows also those GPUs of the node that the runtime kept
// out. "none" means no GPU.
//
// A reading does not tell which device an instance of MIG (MIG-…) belongs to. So if a list names an instance, Visible
// returns every device that MIG divides.
func Visible(reading Reading, lookupEnv func(string) (string, bool)) []GPU {
	gpus := reading.GPUs
	if list, ok := lookupEnv("NVIDIA_VISIBLE_DEVICES"); ok {
		gpus = letIn(gpus, list)
	}
	if list, ok := lookupEnv("CUDA_VISIBLE_DEVICES"); ok {
		gpus = chosen(gpus, list)
	}
	return gpus
}

// letIn applies NVIDIA_VISIBLE_DEVICES.
func letIn(gpus []GPU, list string) []GPU {
	if strings.TrimSpace(list) == "none" {
		return nil
	}
	var named []GPU
	uuids := false
	for word := range strings.SplitSeq(list, ",") {
		if word = strings.TrimSpace(word); isUUID(word) {
			uuids = true
			named = add(named, devicesByUUID(gpus, word))
		}
	}
	if !uuids {
		return gpus
	}
	sortGPUs(named)
	return named
}

// chosen applies CUDA_VISIBLE_DEVICES.
func chosen(gpus []GPU, list string) []GPU {
	var picked []GPU
	for word := range strings.SplitSeq(list, ",") {
		word = strings.TrimSpace(word)
		if isUUID(word) {
			found := devicesByUUID(gpus, word)
			if len(found) == 0 {
				return picked
			}
			picked = add(picked, found)
			continue
		}
		i, err := strconv.Atoi(word)
		if err != nil || i < 0 || i >= len(gpus) {
			return picked
		}
		picked = add(picked, gpus[i:i+1])
	}
	return picked
}

func isUUID(word string) bool {
	return strings.HasPrefix(word, "GPU-") || strings.HasPrefix(word, "MIG-")
}

// devicesByUUID returns the devices that a UUID, or the beginning of one, can mean. If a beginning fits several
// devices, it returns none, as CUDA does. In a reading, the instances of a device have the UUID of the device.
func devicesByUUID(gpus []GPU, word string) []GPU {
	if old, ok := strings.CutPrefix(word, "MIG-GPU-"); ok { // MIG-GPU-<uuid>/<instance>/<compute instance>, before R470
		parent, _, _ := strings.Cut(old, "/")
		return devicesByUUID(gpus, "GPU-"+parent)
	}
	var found []GPU
	for _, g := range gpus {
		if strings.HasPrefix(word, "MIG-") && g.MIG != "" || strings.HasPrefix(g.UUID, word) {
			found = append(found, g)
		}
	}
	several := slices.ContainsFunc(found, func(g GPU) bool { return g.UUID != found[0].UUID })
	if several && strings.HasPrefix(word, "GPU-") {
		return nil
	}
	return found
}

// add appends those of the found GPUs that are not yet in the list.
func add(list, found []GPU) []GPU {
	for _, g := range found {
		if !slices.ContainsFunc(list, func(have GPU) bool { return have.UUID == g.UUID && have.MIG == g.MIG && have.Index == g.Index }) {
			list = append(list, g)
		}
	}
	return list
}
