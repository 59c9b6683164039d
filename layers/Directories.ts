// SPDX-License-Identifier: AGPL-3.0-or-later
/** Making directories with their parents. Node's own `recursive` never ends below /proc. */
import * as fs from "node:fs"
import * as path from "node:path"

/**
 * A directory and those missing above it, each with `mode`; gives the highest that was made, or
 * undefined if all were there. Throws what the system says, ENOTDIR where a file is in the way.
 */
export const make = (directory: string, mode: number): string | undefined => {
  const whole = path.resolve(directory)
  if (fs.statSync(whole, { throwIfNoEntry: false })?.isDirectory() === true) return undefined
  const parent = path.dirname(whole)
  const highest = parent === whole ? undefined : make(parent, mode)
  return one(whole, mode) ? (highest ?? whole) : highest
}

/** False = somebody else has made it in this instant. */
const one = (directory: string, mode: number): boolean => {
  try {
    fs.mkdirSync(directory, { mode })
    return true
  } catch (error) {
    if (fs.statSync(directory, { throwIfNoEntry: false })?.isDirectory() === true) return false
    throw error
  }
}
