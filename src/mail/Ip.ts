// SPDX-License-Identifier: AGPL-3.0-or-later
/** Internet addresses and networks as text and octets (RFC 791, RFC 4291 section 2.2). Pure. */

/** A network: the first `bits` bits of `octets` (4 or 16). */
export interface Network {
  readonly octets: ReadonlyArray<number>
  readonly bits: number
}

/**
 * The octets of an address, 4 or 16; undefined = the text is no address. An IPv4 address that a
 * socket for both families shows as `::ffff:a.b.c.d` is the IPv4 address.
 */
export const parse = (text: string): ReadonlyArray<number> | undefined => {
  const octets = text.includes(":") ? parse6(text) : parse4(text)
  const isMapped = octets?.length === 16 && mappedPrefix.every((octet, i) => octets[i] === octet)
  return isMapped ? octets.slice(12) : octets
}

const mappedPrefix = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255]

const parse4 = (text: string): ReadonlyArray<number> | undefined => {
  if (!/^\d{1,3}(?:\.\d{1,3}){3}$/.test(text)) return undefined
  const octets = text.split(".").map(Number)
  return octets.every((octet) => octet < 256) ? octets : undefined
}

const parse6 = (text: string): ReadonlyArray<number> | undefined => {
  const halves = text.split("::")
  if (halves.length > 2) return undefined
  const head = groups(halves[0]!, halves.length === 1)
  const tail = halves.length === 2 ? groups(halves[1]!, true) : []
  if (head === undefined || tail === undefined) return undefined
  const missing = 16 - head.length - tail.length
  if (halves.length === 1 ? missing !== 0 : missing < 2) return undefined
  return [...head, ...zeros(missing), ...tail]
}

const zeros = (length: number): ReadonlyArray<number> => Array.from({ length }, () => 0)

/** Groups between colons; only the last may be a dotted IPv4 address. */
const groups = (text: string, last: boolean): ReadonlyArray<number> | undefined => {
  if (text === "") return []
  const octets: Array<number> = []
  const parts = text.split(":")
  for (const [i, part] of parts.entries()) {
    const dotted = last && i === parts.length - 1 && part.includes(".") ? parse4(part) : undefined
    if (dotted !== undefined) octets.push(...dotted)
    else if (/^[0-9a-f]{1,4}$/i.test(part)) {
      octets.push(parseInt(part, 16) >> 8, parseInt(part, 16) & 255)
    } else return undefined
  }
  return octets
}

/** From `192.0.2.0/24`, `2001:db8::/32` or a single address. */
export const parseNetwork = (text: string): Network | undefined => {
  const [address, width, ...rest] = text.split("/")
  const octets = parse(address ?? "")
  if (octets === undefined || rest.length > 0) return undefined
  if (width !== undefined && !/^\d{1,3}$/.test(width)) return undefined
  const bits = width === undefined ? octets.length * 8 : Number(width)
  return bits <= octets.length * 8 ? { octets, bits } : undefined
}

/** Whether an address lies in a network. */
export const contains = (network: Network, octets: ReadonlyArray<number>): boolean => {
  if (octets.length !== network.octets.length) return false
  return network.octets.every((octet, i) => {
    const bits = Math.min(Math.max(network.bits - i * 8, 0), 8)
    return (octet ^ octets[i]!) >> (8 - bits) === 0
  })
}

const loopback: ReadonlyArray<Network> = [
  { octets: [127, 0, 0, 0], bits: 8 },
  { octets: [...zeros(15), 1], bits: 128 }
]

/** Whether an address is this host's own (RFC 1122 section 3.2.1.3, RFC 4291 section 2.5.3). */
export const isLoopback = (octets: ReadonlyArray<number>): boolean =>
  loopback.some((network) => contains(network, octets))

/**
 * The network a client sits in, as text: /24, or /48, which is the least that is given to one
 * site (RFC 6177). All loopback addresses are one neighbourhood.
 */
export const neighbourhood = (octets: ReadonlyArray<number>): string => {
  if (isLoopback(octets)) return "127.0.0.0/24"
  if (octets.length === 4) return `${octets.slice(0, 3).join(".")}.0/24`
  return `${group(octets, 0)}:${group(octets, 2)}:${group(octets, 4)}::/48`
}

/**
 * Who is counted as one, as text: an IPv4 address, or the IPv6 /64 in which a single host has all
 * addresses (RFC 4291 section 2.5.4, RFC 8981).
 */
export const source = (octets: ReadonlyArray<number>): string =>
  octets.length === 4
    ? octets.join(".")
    : `${[0, 2, 4, 6].map((i) => group(octets, i)).join(":")}::/64`

const group = (octets: ReadonlyArray<number>, i: number): string =>
  ((octets[i]! << 8) | octets[i + 1]!).toString(16)
